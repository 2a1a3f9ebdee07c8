"""What tests that make trials up say of them where it does not matter to the test."""

from __future__ import annotations

from typing import Any

EXPECTED: dict[str, Any] = {
    "predicted_uncalibrated": 1e-4,
    "predicted_base": 1e-4,
    "predicted": 1e-4,
    "predicted_use": (1.0, 1.0, 0.0),
    "temperature": 1.0,
}
