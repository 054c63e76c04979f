#include "src/my_optimizer.h"
