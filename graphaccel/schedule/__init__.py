"""Pipeline schedules as plain data: built, given messages, proved and drawn without a process."""
