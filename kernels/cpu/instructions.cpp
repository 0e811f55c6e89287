// Says which vector instructions the operators were compiled for; a part of every operator's library.

#include "lanes.hpp"

extern "C" const char* instructions() { return INSTRUCTIONS; }
