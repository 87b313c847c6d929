"""Console and commands around a run: plan, launch, watch, diagnose. Never imports torch."""

VERSION = "0.1.0"
