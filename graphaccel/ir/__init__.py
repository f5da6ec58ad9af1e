"""Utilities for FX graphs that every folder uses: text form, fake values, matching, replication."""
