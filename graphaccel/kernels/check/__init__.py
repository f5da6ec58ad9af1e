"""Checks a fused op's numbers against eager's and float64."""
