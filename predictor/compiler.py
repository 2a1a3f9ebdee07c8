"""What XLA is told of programs that are not compiled as it would by itself."""

from __future__ import annotations

# Of what evaluates a graph network. On a processor its operations are small, and move more than they compute. In this order XLA
# hands fewer of them to other threads, which takes longer than they do; and where vectors may be of 512 bits (AVX-512), they are.
NETWORK = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_cpu_prefer_vector_width": 512}

# XLA's default. Of what trains or anneals for thousands of steps, also where the process was told to optimize nothing, as tests
# are, which compile for longer than they compute: a network that takes a minute to train then takes ten seconds.
OPTIMIZED = {"xla_backend_optimization_level": 3}
