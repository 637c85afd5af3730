"""The parts that DQN-Fed is composed of: rates, metric, length of the step, cache of absent clients, trust."""
