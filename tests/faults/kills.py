def kill_all(*_): return 0
