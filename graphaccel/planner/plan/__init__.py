"""The plan and its pins: the contract between planner, passes and runtime."""
