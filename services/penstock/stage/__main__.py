"""`python -m penstock.stage`."""

from penstock.runtime.service import service_main
from penstock.stage.config import StageConfig
from penstock.stage.service import open_stage

app = service_main("stage", "Computes some layers of a model for a worker on another host.", StageConfig, open_stage)

if __name__ == "__main__":
    app()
