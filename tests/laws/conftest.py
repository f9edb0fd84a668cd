"""Property tests of the laws run on busy machines: no example has a deadline."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile("laws", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# scripts/mutate.py asks only whether a test fails, and always the same test.
settings.register_profile(
    "mutants", settings.get_profile("laws"), derandomize=True, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(os.environ.get("OCTAVO_LAW_PROFILE", "laws"))
