"""Predicts what a training configuration costs on given hardware, before it runs.

Home of the runtime predictor; it imports neither ``muzerox`` nor ``tuner``, which import-linter enforces.
"""
