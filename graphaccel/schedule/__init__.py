"""Pipeline schedules as plain data: built, given messages, validated, drawn; no processes."""
