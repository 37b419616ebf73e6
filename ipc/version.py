"""The version of Quire, as pyproject.toml has it (a test compares them)."""

VERSION = "0.1.0"
VERSION_TUPLE = tuple(int(part) if part.isdecimal() else part for part in VERSION.split("."))
