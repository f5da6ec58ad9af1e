"""Answers after the search: what another decision or machine changes."""
