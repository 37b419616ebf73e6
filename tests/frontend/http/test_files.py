"""/v1/files: forms, lists in pages, contents in pieces, owners, bounds."""
