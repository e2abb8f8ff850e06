"""The Batch API behind the door: files and batches that outlast the gateway, and their lines on the way to answers."""
