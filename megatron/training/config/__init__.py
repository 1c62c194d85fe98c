"""Settings of a training run, one subject per file; `container.RunConfig` holds them all."""
