#include "Arduino.h"
#include "learn.ino"
int main() {
    setup();
    for (int i = 0; i < 20000; i++) loop();
}
