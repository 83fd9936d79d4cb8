"""Decomposes any JAX function of (params, *batch) by replaying its jaxpr; changes no model and trains nothing."""
