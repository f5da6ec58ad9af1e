"""What every folder shares about graphs: their text, and checks that they are sound."""
