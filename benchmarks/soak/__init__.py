"""Long runs: killed ranks, memory over hundreds of steps, how long a save stops training."""
