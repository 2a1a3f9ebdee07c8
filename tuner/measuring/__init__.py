"""Measuring: the machine and a configuration's numbers, and trials of it in subprocesses under their allocation."""
