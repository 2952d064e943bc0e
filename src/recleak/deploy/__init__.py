"""Beyond a simulation: the same models, defenses and attacks in systems that run elsewhere."""
