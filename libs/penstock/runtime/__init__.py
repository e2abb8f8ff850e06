"""Every process of the mesh needs it: configuration, telemetry, metrics, background tasks, a start and an end."""
