"""`python -m penstock.picker`."""

from penstock.picker.config import PickerConfig
from penstock.picker.service import open_picker
from penstock.runtime.service import service_main

app = service_main("picker", "Tells an Envoy to which gateway a request goes.", PickerConfig, open_picker)

if __name__ == "__main__":
    app()
