"""Markdown tables of committed measurements, which docs/measured.py puts into the documents."""
