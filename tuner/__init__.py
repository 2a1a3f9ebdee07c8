"""Searches configurations with the predictor, measures the few that matter, allocates resources and trains.

Home of the tuner; only ``tuner.bridge`` may import ``muzerox``, which import-linter enforces.
"""
