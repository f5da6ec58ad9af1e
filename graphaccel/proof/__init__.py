"""Whether a captured step computes what the user's model computes: both are run and compared."""
