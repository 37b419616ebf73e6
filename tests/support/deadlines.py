"""How long tests wait for what must happen: longer than any busy machine needs, shorter than the time a hanging test has."""

DEADLINE_S = 200.0
