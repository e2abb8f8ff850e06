"""One pass through the model: the runner, which drafts it accepts, and what happens when a step fails."""
