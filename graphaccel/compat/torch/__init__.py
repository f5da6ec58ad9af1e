"""Everything of torch that it does not promise to keep, by what it serves.

The only package that may import names with an underscore from torch. Each name says what it is used
for, so that a new torch version is checked here and nowhere else.
"""
