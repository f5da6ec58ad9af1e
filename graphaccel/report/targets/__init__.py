"""Export targets: one file a target, each the configuration of a plan in its own format."""
