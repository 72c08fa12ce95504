# The GPU kernels as one fatbin inside the library. Without nvcc the core builds all the same, copies by the driver's
# calls, and says so (Device.kernels).
option(TORPOR_KERNELS "Compile the GPU kernels where nvcc is found" ON)
if(NOT TORPOR_KERNELS OR TORPOR_SANITIZE)
  return()
endif()
find_program(TORPOR_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
if(NOT TORPOR_NVCC)
  message(STATUS "no nvcc: the core is built without GPU kernels")
  return()
endif()

execute_process(COMMAND ${TORPOR_NVCC} --list-gpu-code OUTPUT_VARIABLE TORPOR_GPU_CODES ERROR_QUIET)
set(TORPOR_GPU_FLAGS)
foreach(code 80 90 100)
  if(TORPOR_GPU_CODES MATCHES "sm_${code}\n")
    list(APPEND TORPOR_GPU_FLAGS -gencode arch=compute_${code},code=sm_${code})
  endif()
endforeach()
list(APPEND TORPOR_GPU_FLAGS -gencode arch=compute_80,code=compute_80) # for every other GPU

set(TORPOR_KERNEL_FOLDER ${PROJECT_SOURCE_DIR}/native/src/device/kernels)
set(TORPOR_FATBIN ${PROJECT_BINARY_DIR}/torpor_kernels.fatbin)
add_custom_command(
  OUTPUT ${TORPOR_FATBIN}
  COMMAND ${TORPOR_NVCC} -std=c++17 -O3 -fatbin ${TORPOR_GPU_FLAGS} -I${PROJECT_SOURCE_DIR}/native/src -o ${TORPOR_FATBIN}
          ${TORPOR_KERNEL_FOLDER}/kernels.cu
  DEPENDS ${TORPOR_KERNEL_FOLDER}/kernels.cu ${TORPOR_KERNEL_FOLDER}/work.hpp
          ${PROJECT_SOURCE_DIR}/native/src/checksum_mix.hpp
  COMMENT "GPU kernels")
set_source_files_properties(
  ${TORPOR_KERNEL_FOLDER}/image.cpp PROPERTIES COMPILE_DEFINITIONS TORPOR_FATBIN="${TORPOR_FATBIN}"
                                               OBJECT_DEPENDS ${TORPOR_FATBIN})
