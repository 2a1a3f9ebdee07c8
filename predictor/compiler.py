"""What XLA is told of programs that are not compiled as it would by itself."""

from __future__ import annotations

# On a processor the operations of a network are small. In this order XLA hands fewer of them to other threads, which takes
# longer than they do: 1.14 times the candidates/s.
IN_ORDER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

# XLA's default. Of what trains or anneals for thousands of steps, also where the process was told to optimize nothing, as tests
# are, which compile for longer than they compute: a network that takes a minute to train then takes ten seconds.
OPTIMIZED = {"xla_backend_optimization_level": 3}
