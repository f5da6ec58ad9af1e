"""What several benchmarks use: settings and results, models, counted launches, meshes of ranks."""
