"""python -m gcnn is the command gcnn; torchrun starts it so."""

from gcnn.cli import main

raise SystemExit(main())
