"""What routers know of the mesh, as plain values for people: for `penstock ctl` and for the gateway's console."""
