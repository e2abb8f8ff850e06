"""What every process of the mesh needs: configuration, telemetry, metrics, a start and an end."""
