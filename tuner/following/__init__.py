"""Training that is followed: in phases, each with the configuration that is expected to be fastest by then."""
