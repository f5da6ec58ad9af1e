"""Answers after the search: what another decision or another machine would change."""
