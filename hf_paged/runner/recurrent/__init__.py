"""Runner of models with a recurrent state: the pool of states, and steps in which no two prompts meet."""
