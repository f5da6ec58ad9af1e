"""Coverage measured on lists of others: torch's operators and modules, model libraries."""
