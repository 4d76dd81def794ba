"""`python -m runtime.device`: the device process."""

from runtime.device.loop import main

main()
