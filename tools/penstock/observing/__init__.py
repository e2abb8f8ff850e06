"""What people look at: the Grafana boards and the table of metrics, made from descriptions by `make boards`."""
