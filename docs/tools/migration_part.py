commands = flags = routes = fields = metrics = lambda: ""
