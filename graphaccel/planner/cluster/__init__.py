"""Devices, how they are linked, and how long collectives take on them."""
