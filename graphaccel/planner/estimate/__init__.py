"""Memory and time of a plan in closed form, predicted without running any pass."""
