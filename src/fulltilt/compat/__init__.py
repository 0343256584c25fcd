"""Translation of other systems' configurations, verl's and ChatLearn's, into runs of fulltilt: every key gets an answer, and none is
ignored silently."""
