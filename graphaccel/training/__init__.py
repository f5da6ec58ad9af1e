"""Training from the command line: settings, models, rows of data, and the run itself."""
