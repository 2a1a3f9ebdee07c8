"""Representation, dynamics and prediction networks (Flax NNX) as pure functions over parameters."""

from muzerox.networks.model import Model, make_model

__all__ = ["Model", "make_model"]
