"""hypothesis's examples have no deadline: a machine that others use stalls for longer than the usual 200 ms."""

from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
