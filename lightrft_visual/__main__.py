"""`python -m lightrft_visual` is the command `lightrft-visual`."""

from .cli import main

main()
