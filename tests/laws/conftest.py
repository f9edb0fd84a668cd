"""Property tests of the laws run on busy machines: no example has a deadline."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("laws", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("laws")
