"""The command line: starts the mesh on one host, shows it, measures it. It talks to the services as processes."""
